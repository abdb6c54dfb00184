"""Networks whose parametrization is known, and ones with a planted error, for `fl.width_check`."""
