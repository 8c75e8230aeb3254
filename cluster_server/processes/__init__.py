"""The backend in which instances and jobs are processes of this machine."""
