"""The compiled steps, the state they carry, and the runner that feeds them."""
