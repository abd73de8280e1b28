"""What Hopper and Blackwell share: the order of tiles, views of packed rows, the activation's arithmetic."""
