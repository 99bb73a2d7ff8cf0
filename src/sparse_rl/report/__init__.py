"""What a person looks at after a run, or during one: a page from run folders. It reads files, and knows neither torch nor models."""
