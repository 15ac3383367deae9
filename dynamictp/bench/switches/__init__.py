"""Many switches under load: how soon they take effect, and what running streams see of them."""
