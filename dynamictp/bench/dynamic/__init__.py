"""Does it pay to let the degree follow the traffic? One schedule on static layouts and in dynamic mode."""
