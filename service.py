# service composition root, written by the server room
