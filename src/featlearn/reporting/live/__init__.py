"""The live page: the report, sent again while runs are being written (`featlearn live`, `fl.watch(live=True)`)."""
