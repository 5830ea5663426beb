"""What a kernel's tensors mean: what every stage must be, and how what was given differs. No kernel is called here."""
