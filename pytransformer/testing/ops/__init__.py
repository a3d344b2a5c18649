"""What tests and benchmarks need of each stem, a file each: `KIT`."""
