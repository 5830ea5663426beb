"""The smallest tensors on which a kernel fails as it does on a case, and a test of them."""
