/* Checkpoint rounds by collective clock, for spin.
 *
 * Three ranks run fixed programs (JOB 1..3) while a coordinator takes one checkpoint at any moment and lets them go on.
 * Checked: at the image no rank is inside a collective, members stand at equal counts, the network is empty (assertions);
 * nobody is ever left hanging (no invalid end state); and the checkpoint is always taken (ltl taken, under weak fairness).
 *
 *     spin -DJOB=1 -a clock.pml && cc -O2 -w -DNFAIR=4 -o pan pan.c && ./pan -a -f -m1000000     (ltl and assertions)
 *     spin -DJOB=1 -a clock.pml && cc -O2 -w -DSAFETY -DNOCLAIM -o pan pan.c && ./pan -m1000000   (end states too)
 */
#ifndef JOB
#define JOB 1
#endif
#define N 3
#define C 3

mtype = { COLL, SEND, RECV, END, HOLD, CLOSE, IMAGE, RESUME, COMPUTING, WAITING, HELD, INSIDE };

/* What the program of a rank does at its p-th step. */
#if JOB == 1 /* rank 1 is behind on 0 and first needs 2, which stands at its target */
#define MEMBER(c, r) ((c == 0 && r != 2) || (c == 1 && r != 1) || (c == 2 && r != 0))
#define KIND(r, p) (p < 2 -> COLL : END)
#define ARG(r, p) (r == 0 -> (p == 0 -> 0 : 1) : (r == 1 -> (p == 0 -> 2 : 0) : (p == 0 -> 2 : 1)))
#elif JOB == 2 /* rank 1 is behind on 0 and waits for a message that rank 2 sends after its collective */
#define MEMBER(c, r) ((c == 0 && r != 2) || (c == 1 && r == 2))
#define KIND(r, p) (r == 0 -> (p == 0 -> COLL : END) : \
  (r == 1 -> (p == 0 -> RECV : (p == 1 -> COLL : END)) : (p == 0 -> COLL : (p == 1 -> SEND : END))))
#define ARG(r, p) (r == 0 -> 0 : (r == 1 -> (p == 0 -> 2 : 0) : 1))
#else /* messages that nobody has asked for yet cross a barrier */
#define MEMBER(c, r) (c == 0)
#define KIND(r, p) (r == 0 -> (p == 0 -> SEND : (p == 1 -> COLL : END)) : \
  (p == 0 -> COLL : (p == 1 && r == 1 -> RECV : END)))
#define ARG(r, p) (r == 0 && p == 0 -> 1 : 0)
#endif

byte pc[N];
bool inside[N], held[N], closed[N];
byte entered[N * C];              /* what a rank has entered on each communicator */
byte allowed[N * C];              /* the targets as each rank knows them */
byte sent[N * N], received[N * N], wire[N * N], inbox[N * N];

/* the last wave, and the one before */
mtype activity[N];
byte at[N], seen[N * C], seen_sent[N * N], seen_received[N * N];
byte target[C];
bool has_targets, unchanged, image_taken;

chan ask[N] = [1] of { mtype };
chan answer = [N] of { byte };

#define ALL_INSIDE(c, n) \
  ((!MEMBER(c, 0) || entered[0 * C + c] >= n) && (!MEMBER(c, 1) || entered[1 * C + c] >= n) && \
   (!MEMBER(c, 2) || entered[2 * C + c] >= n))

inline publish(me) {
  /* one rank's status; a wave is unchanged if no rank's is */
  byte i;
  mtype now;
  if
  :: KIND(me, pc[me]) == COLL && inside[me] -> now = INSIDE
  :: KIND(me, pc[me]) == COLL && !inside[me] -> now = HELD
  :: KIND(me, pc[me]) == RECV -> now = WAITING
  :: else -> now = COMPUTING
  fi;
  if :: activity[me] != now || at[me] != ARG(me, pc[me]) -> unchanged = false :: else fi;
  activity[me] = now;
  at[me] = ARG(me, pc[me]);
  for (i : 0 .. C - 1) {
    if :: seen[me * C + i] != entered[me * C + i] -> unchanged = false :: else fi;
    seen[me * C + i] = entered[me * C + i]
  }
  for (i : 0 .. N - 1) {
    if :: seen_sent[me * N + i] != sent[me * N + i] -> unchanged = false :: else fi;
    if :: seen_received[me * N + i] != received[me * N + i] -> unchanged = false :: else fi;
    seen_sent[me * N + i] = sent[me * N + i];
    seen_received[me * N + i] = received[me * N + i]
  }
  i = 0
}

/* The three parts of a rank are processes of their own, so that none can starve another. */
proctype Control(byte me) {
  mtype step;
  byte c;
end:
  do
  :: atomic {
      ask[me] ? step ->
      if
      :: step == HOLD || step == CLOSE ->
        held[me] = true;
        closed[me] = (step == CLOSE);
        for (c : 0 .. C - 1) { allowed[me * C + c] = (has_targets -> target[c] : 0) }
        c = 0;
        publish(me);
        answer ! me
      :: step == IMAGE -> answer ! me
      :: step == RESUME -> held[me] = false; closed[me] = false
      fi;
      step = 0
    }
  od
}

proctype Program(byte me) {
end:
  do
  :: atomic { KIND(me, pc[me]) == SEND && !closed[me] ->
      sent[me * N + ARG(me, pc[me])]++; wire[me * N + ARG(me, pc[me])]++; pc[me]++ }
  :: atomic { KIND(me, pc[me]) == RECV && !closed[me] && inbox[ARG(me, pc[me]) * N + me] > 0 ->
      inbox[ARG(me, pc[me]) * N + me]--; pc[me]++ }
  :: atomic { KIND(me, pc[me]) == COLL && !inside[me] && !closed[me] &&
      (!held[me] || entered[me * C + ARG(me, pc[me])] < allowed[me * C + ARG(me, pc[me])]) ->
      entered[me * C + ARG(me, pc[me])]++; inside[me] = true }
  :: atomic { KIND(me, pc[me]) == COLL && inside[me] &&
      ALL_INSIDE(ARG(me, pc[me]), entered[me * C + ARG(me, pc[me])]) -> inside[me] = false; pc[me]++ }
  od
}

proctype Network(byte me) {
end:
  do
  :: atomic { wire[0 * N + me] > 0 -> wire[0 * N + me]--; inbox[0 * N + me]++; received[me * N + 0]++ }
  :: atomic { wire[1 * N + me] > 0 -> wire[1 * N + me]--; inbox[1 * N + me]++; received[me * N + 1]++ }
  :: atomic { wire[2 * N + me] > 0 -> wire[2 * N + me]--; inbox[2 * N + me]++; received[me * N + 2]++ }
  od
}

inline wave(step) {
  unchanged = true;
  for (r : 0 .. N - 1) { ask[r] ! step }
  for (r : 0 .. N - 1) { answer ? _ }
  r = 0
}

proctype Coordinator() {
  byte r, s, c;
  bool aligned, raised, lags[N], drained;
  /* HOLD: agree on the targets */
  wave(HOLD);
  d_step {
    for (r : 0 .. N - 1) { for (c : 0 .. C - 1) {
      if :: seen[r * C + c] > target[c] -> target[c] = seen[r * C + c] :: else fi } }
    r = 0; c = 0;
    has_targets = true
  }
  do
  :: aligned -> break
  :: else ->
    wave(HOLD);
    d_step {
      aligned = true; raised = false;
      for (r : 0 .. N - 1) {
        lags[r] = false;
        for (c : 0 .. C - 1) {
          if :: MEMBER(c, r) && seen[r * C + c] < target[c] -> lags[r] = true; aligned = false :: else fi
        }
        if :: activity[r] == INSIDE -> aligned = false :: else fi
      }
      if
      :: !aligned ->
        for (r : 0 .. N - 1) {
          if
          :: activity[r] == HELD && (lags[r] || unchanged) && seen[r * C + at[r]] >= target[at[r]] ->
            target[at[r]] = seen[r * C + at[r]] + 1; raised = true
          :: else
          fi
        }
      :: else
      fi;
      r = 0; c = 0; raised = false
    }
  od;
  /* CLOSE: two equal waves in which everything sent has been received */
  wave(CLOSE);
  do
  :: drained -> break
  :: else ->
    wave(CLOSE);
    d_step {
      drained = unchanged;
      for (r : 0 .. N - 1) { for (s : 0 .. N - 1) {
        if :: seen_sent[r * N + s] != seen_received[s * N + r] -> drained = false :: else fi } }
      r = 0; s = 0
    }
  od;
  for (r : 0 .. N - 1) { ask[r] ! IMAGE }
  for (r : 0 .. N - 1) { answer ? _ }
  atomic {
    for (r : 0 .. N - 1) {
      assert(!inside[r]);
      for (s : 0 .. N - 1) {
        assert(wire[r * N + s] == 0);
        for (c : 0 .. C - 1) { assert(!MEMBER(c, r) || !MEMBER(c, s) || entered[r * C + c] == entered[s * C + c]) }
      }
    }
    image_taken = true;
    r = 0; s = 0; c = 0
  }
  for (r : 0 .. N - 1) { ask[r] ! RESUME }
  /* and every program comes to its end */
  (KIND(0, pc[0]) == END && KIND(1, pc[1]) == END && KIND(2, pc[2]) == END)
}

init {
  atomic {
    run Control(0); run Control(1); run Control(2);
    run Program(0); run Program(1); run Program(2);
    run Network(0); run Network(1); run Network(2);
    run Coordinator()
  }
}

ltl taken { <> image_taken }
