"""One run: configuration -> recipe -> rounds -> state -> scores -> a folder and a result."""
