"""Colors of all figures, by Okabe and Ito: color-blind readers can tell them apart."""

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, YELLOW, GRAY, BLACK = "#56B4E9", "#E69F00", "#999999", "#000000"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GRAY, BLACK)
DARK_GRAY, LIGHT_GRAY = "#595959", "#D9D9D9"
REGIMES = {"lazy": BLUE, "mixed": "#F0E442", "lazy then rich": GREEN, "rich": ORANGE, "cannot tell": GRAY}
