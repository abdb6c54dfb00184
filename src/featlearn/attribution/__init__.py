"""Attribution of outputs to training samples, and replays of what a run would have been without them."""
