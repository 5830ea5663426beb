"""The judge: the values that every stage must have, and how a kernel's tensors differ from them. It calls no kernel."""
