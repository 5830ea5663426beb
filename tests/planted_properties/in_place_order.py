"""Where a result lies in the memory of x or residual, squares are added in another order than where it has its own."""

from planted_sums import normalized, striped

from lastbit.kernel import kernel


@kernel(
    "rms_norm",
    contract="fp32_multiply+rounded_sum",
    name="planted[in place]",
    out={"out": "output", "residual_out": "residual_sum"},
    mutates=("x", "residual"),
)
def in_place_order(out, residual_out, x, residual, weight, *, eps):
    given = {tensor.data_ptr() for tensor in (x, residual)}
    in_place = not given.isdisjoint({out.data_ptr(), residual_out.data_ptr()})
    total = (x.float() + residual.float()).to(x.dtype)
    squares = striped(total.float().square(), 1 if in_place else 8)
    residual_out.copy_(total)
    out.copy_(normalized(total, squares, weight, eps))
