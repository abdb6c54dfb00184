"""What the claims of a figure say of runs that were made up."""


def failing(figure, setup, runs) -> list[str]:
    """Names of the claims that do not hold."""
    return [claim.id for claim in figure.claims(setup, runs) if not claim.holds]
