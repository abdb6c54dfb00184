"""What `fl.report` does: one HTML page with the verdict on runs and what led to it, and `figures` of the same."""

from featlearn.reporting import figures

__all__ = ["figures"]
