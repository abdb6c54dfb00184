"""Reports of watched runs: one HTML page with the verdict and what led to it, and figures of the same for print."""

from featlearn.report import figures
from featlearn.report.page import report

__all__ = ["figures", "report"]
