-- ARGV: name, token, ttl -> 1 | 0 it is somebody else's, or nobody's
return mine(unpack(ARGV)) and 1 or 0
