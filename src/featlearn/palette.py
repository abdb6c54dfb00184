"""Colors of all figures, after Okabe and Ito. Grays differ in lightness, which color-blind readers need."""

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, YELLOW, GRAY, BLACK = "#56B4E9", "#E69F00", "#999999", "#000000"
DARK_GRAY, LIGHT_GRAY = "#595959", "#D9D9D9"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, DARK_GRAY, BLACK)
REGIMES = {"lazy": BLUE, "mixed": "#F0E442", "lazy then rich": GREEN, "rich": ORANGE, "cannot tell": LIGHT_GRAY}
