"""Router: fp32 scores, sigmoid, biased choice with ties to the lowest id, weights, and the lists of the grouped GEMMs."""
