"""Runs whose regime theory fixes: on some the verdict is calibrated, by others it is judged."""
