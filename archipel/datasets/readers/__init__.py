"""One file for each kind of file, which opens it as a `Dataset` or a `Stream` and imports its library when called."""
