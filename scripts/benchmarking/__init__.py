"""What the benchmark is made of: contestants in processes of their own that take turns on the same cores."""
