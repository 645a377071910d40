"""Lines that `insitu serve` prints while it starts and trains."""
