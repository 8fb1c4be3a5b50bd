"""Behind a Flower server: its strategy, the clients' app, project folders, trials on this machine."""
