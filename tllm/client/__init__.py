"""The user's half: requests, results and global steering, and the engines that carry them."""
