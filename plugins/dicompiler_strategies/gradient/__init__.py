"""The strategy `gradient`: gradient descent on the probabilities of each layer's splits, then local search."""
