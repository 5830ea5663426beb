"""Mixtures of experts whose dots are added in another order for something that a pair's result has nothing to do with.

`zero adapter`: with adapters, be they zero. `other tokens`: for an expert that has many pairs. `relabelling`: for
experts of odd number. `place within an expert`: for the second half of an expert's pairs.
"""

from planted_experts import mixture

from lastbit.kernel import kernel

MANY = 25
"""From so many pairs on an expert has other tiles."""


def declare(name, by_sign):
    @kernel("moe_lora", contract="fused", name=f"planted[{name}]")
    def experts(
        x, expert_ids, routing_weights, gate_proj, up_proj, down_proj,
        gate_lora_a=None, gate_lora_b=None, up_lora_a=None, up_lora_b=None, down_lora_a=None, down_lora_b=None,
        *, scaling=1.0, first_expert=0,
    ):  # fmt: skip
        weights = {
            "gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj,
            "gate_lora_a": gate_lora_a, "gate_lora_b": gate_lora_b, "up_lora_a": up_lora_a, "up_lora_b": up_lora_b,
            "down_lora_a": down_lora_a, "down_lora_b": down_lora_b,
        }  # fmt: skip
        adapted = gate_lora_a is not None

        def of_pairs(expert, pairs):
            return [bool(by_sign(expert, place, pairs, adapted)) for place in range(pairs)]

        return mixture(x, expert_ids, routing_weights, weights, scaling, first_expert, of_pairs)


declare("zero adapter", lambda expert, place, pairs, adapted: adapted)
declare("other tokens", lambda expert, place, pairs, adapted: pairs >= MANY)
declare("relabelling", lambda expert, place, pairs, adapted: expert % 2)
declare("place within an expert", lambda expert, place, pairs, adapted: place >= pairs // 2)
