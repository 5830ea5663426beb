"""Rows that can be read in vectors are added in eight lanes, others one by one: address and strides matter."""

from planted_sums import rms_norm

from lastbit.kernel import kernel

VECTOR = 8


def in_vectors(x):
    """Return whether every row begins at a multiple of a vector, and has a whole number of them."""
    apart = [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1][:-1]
    neighbours = x.stride(-1) == 1 or x.shape[-1] == 1
    sizes = (x.data_ptr() // x.element_size(), x.shape[-1], *apart)
    return neighbours and not any(size % VECTOR for size in sizes)


@kernel("rms_norm", contract="fp32_multiply", name="planted[vectors or scalars]")
def vectors_or_scalars(x, weight, *, eps):
    return rms_norm(x, weight, eps, VECTOR if in_vectors(x) else 1)
