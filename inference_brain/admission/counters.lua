-- What brains share, in one round trip. All times are those of this server, so that no brain's clock matters.
--
-- ARGV[1]: prefix of all keys. ARGV[2]: MessagePack:
--   {now (0: this server's), brain, sequence, orgs, served}
--   orgs:   {org: {limits: {r, t, c}, uses: {age, r, t, age, r, t, …}, running, needs: {r, t, c}, wants: {r, t, c}}}
--           r: requests in a minute, t: tokens in a minute, c: requests at once; a limit of -1 is none
--   served: {model: {org: {more, least}}}
-- ARGV[3]: a report for the other brains.
-- Uses and `more` are added once for each sequence, however often it is sent.
--
-- Returns {brains, orgs, served, report, …}, in MessagePack:
--   orgs:   {org: {grants: {r, t, more c}, used: {r, t}, running elsewhere, seconds until there is room: {r, t}}}
--   served: {model: {org: counter}}
-- and then the reports of all other brains that are alive.

local WINDOW = 61       -- seconds: a whole minute before the present second
local ALIVE = 3         -- seconds after which a silent brain's grants and report vanish
local KEPT = 600        -- seconds that counters of tokens served are kept without requests

local prefix = ARGV[1]
local now, brain, sequence, orgs, served = unpack(cmsgpack.unpack(ARGV[2]))
if now == 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local sequence_key = prefix .. 'sequence:' .. brain
local is_new = tonumber(redis.call('GET', sequence_key) or '0') < sequence
redis.call('SET', sequence_key, sequence, 'EX', 2 * WINDOW)
redis.call('SET', prefix .. 'brain:' .. brain, ARGV[3], 'EX', ALIVE)
redis.call('ZADD', prefix .. 'brains', now + ALIVE, brain)
redis.call('ZREMRANGEBYSCORE', prefix .. 'brains', '-inf', '(' .. now)

-- Grants of one kind: what is needed at once, and what is wanted beyond it unless the limit is near.
local function grant(limit, taken, need, want)
  local free = math.max(0, limit - taken)
  if free - need - want < limit / 4 then return math.min(need, free) end
  return need + want
end

-- Add to a second; what is taken back may have been counted a second earlier or later.
local function add(by_second, when, kind, amount)
  for _, off in ipairs({0, 1, -1}) do
    local one = by_second[when + off]
    if not one and off == 0 then
      one = {0, 0}
      by_second[when] = one
    end
    if one then
      local before = one[kind]
      one[kind] = math.max(0, before + amount)
      amount = amount - (one[kind] - before)
    end
    if amount >= 0 then return end
  end
end

-- Seconds until so much has left the window.
local function seconds_until(uses, second, kind, excess)
  for at = 1, #uses, 3 do
    excess = excess - uses[at + kind]
    if excess <= 0 then return math.max(1, uses[at] + WINDOW - second) end
  end
  return WINDOW
end

local answered = {}
for org, told in pairs(orgs) do
  local limits, new, running, needs, wants = unpack(told)
  local key = prefix .. 'org:' .. org
  local stored = redis.call('GET', key)
  local uses, holders = {}, {}
  if stored then uses, holders = unpack(cmsgpack.unpack(stored)) end

  local second = math.floor(now)
  local by_second = {}
  for at = 1, #uses, 3 do
    if uses[at] > second - WINDOW then by_second[uses[at]] = {uses[at + 1], uses[at + 2]} end
  end
  if is_new then
    for at = 1, #new, 3 do
      local when = second - math.floor(new[at])
      if when > second - WINDOW then
        add(by_second, when, 1, new[at + 1])
        add(by_second, when, 2, new[at + 2])
      end
    end
  end
  local seconds = {}
  for when in pairs(by_second) do seconds[#seconds + 1] = when end
  table.sort(seconds)
  local used = {0, 0}
  uses = {}
  for _, when in ipairs(seconds) do
    local one = by_second[when]
    used = {used[1] + one[1], used[2] + one[2]}
    uses[#uses + 1] = when
    uses[#uses + 1] = one[1]
    uses[#uses + 1] = one[2]
  end

  local elsewhere = {0, 0, 0}
  for name, held in pairs(holders) do
    if name == brain or held[1] <= now then
      holders[name] = nil
    else
      for kind = 1, 3 do elsewhere[kind] = elsewhere[kind] + held[kind + 1] end
    end
  end

  local grants, waits = {0, 0, 0}, {0, 0}
  for kind = 1, 2 do
    if limits[kind] >= 0 then
      local taken = used[kind] + elsewhere[kind]
      grants[kind] = grant(limits[kind], taken, needs[kind], wants[kind])
      local excess = taken + needs[kind] - limits[kind]
      if excess > 0 then waits[kind] = seconds_until(uses, second, kind, excess) end
    end
  end
  if limits[3] >= 0 then
    grants[3] = grant(limits[3], elsewhere[3] + running, needs[3], wants[3])
  end
  holders[brain] = {now + ALIVE, grants[1], grants[2], running + grants[3]}
  redis.call('SET', key, cmsgpack.pack({uses, holders}), 'EX', 2 * WINDOW)
  answered[org] = {grants, used, elsewhere[3], waits}
end

local counters = {}
for model, of_orgs in pairs(served) do
  local key = prefix .. 'served:' .. model
  local values = {}
  for org, told in pairs(of_orgs) do
    local value = tonumber(redis.call('HGET', key, org) or '0')
    value = math.max(value, told[2])
    if is_new then value = value + told[1] end
    redis.call('HSET', key, org, string.format('%.17g', value))
    values[org] = value
  end
  redis.call('EXPIRE', key, KEPT)
  counters[model] = values
end

local alive = redis.call('ZRANGE', prefix .. 'brains', 0, -1)
local answer = {#alive, cmsgpack.pack(answered), cmsgpack.pack(counters)}
for _, other in ipairs(alive) do
  if other ~= brain then
    answer[#answer + 1] = redis.call('GET', prefix .. 'brain:' .. other) or ''
  end
end
return answer
