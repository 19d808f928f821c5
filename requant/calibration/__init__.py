"""Statistics of every linear layer, gathered by running calibration text through the model (`stats.LinearStats` names
them): one file a statistic, `statistics.collect` for all of them."""
