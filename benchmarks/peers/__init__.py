"""What PlexRL's calls are measured beside. Each peer offers one call without work, and says what it promises."""
