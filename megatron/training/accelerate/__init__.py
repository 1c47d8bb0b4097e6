"""torch.compile and CUDA graphs on the layers of a rank."""
