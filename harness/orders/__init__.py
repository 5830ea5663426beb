"""The order in which a kernel adds the terms of a sum, revealed by probing: see `reveal`."""
