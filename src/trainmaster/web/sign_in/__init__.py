"""Sign-in of people: by a token, by the link of the server's own user, by OpenID Connect."""
