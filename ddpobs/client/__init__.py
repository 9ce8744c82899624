"""Reading of a collector's responses: by the command line, by a notebook, and by a training at its end."""
