"""Write a page from run folders, after a run or during it. Reads files, and knows neither torch nor models."""
