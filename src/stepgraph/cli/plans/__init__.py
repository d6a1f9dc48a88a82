"""Plans for several meshes: who plans which, in what order, and in how many processes."""
