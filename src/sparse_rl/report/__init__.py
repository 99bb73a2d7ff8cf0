"""Write an HTML report from run folders, during or after training. Reads only files; needs neither torch nor a model."""
