"""The process that owns one device: views of the weights, the forward pass, sampling, communicators."""
