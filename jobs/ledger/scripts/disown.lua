-- The attempt died while its worker lives: whoever takes the job up next, that worker too, takes up a suspect.
-- -> disowned | fenced
local id, attempt = unpack(ARGV)
local job = read(id)
if not job or job.attempt ~= tonumber(attempt) or job.state ~= 'running' then return 'fenced' end
call('HDEL', job_key(id), 'owner')
return 'disowned'
