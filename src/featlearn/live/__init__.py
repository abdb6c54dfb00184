"""A page that follows runs while they are written: `featlearn live`, `fl.watch(live=True)`."""
