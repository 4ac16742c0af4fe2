"""What happens when a device, a rank or memory fails."""
