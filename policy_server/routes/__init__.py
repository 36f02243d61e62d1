"""The application's routes, a module each."""
