"""Intent: the Django project, its apps, the REST API and the pages."""
