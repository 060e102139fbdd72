/* A plan of messages that all ranks, and the oracle in Python, draw from a seed alone. */
#ifndef RANDOM_MESSAGES_H
#define RANDOM_MESSAGES_H

#include <mpi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014). */
static inline uint64_t mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static inline uint64_t draw(uint64_t *state, uint64_t below) { return (*state = mix(*state)) % below; }

enum { MESSAGES, WILD, PERSISTENT, PARTITIONED, EXCHANGE, FACTS, NUM_KINDS };
static const char *const kind_names[NUM_KINDS] = {"messages", "wild", "persistent", "partitioned", "exchange", "facts"};
enum { MAX_COUNT = 20000, MAX_MESSAGES = 64 };

typedef struct {
    int source, dest, tag, count;
} Letter;

typedef struct {
    uint64_t seed, number;
    int kind, num_rounds, num_parts, num_letters;
    Letter letters[MAX_MESSAGES];
    uint64_t how; /* state of a generator for how things are done: the answer does not depend on it */
} Plan;

static inline int draw_count(uint64_t *state) {
    static const int below[] = {2, 9, 700, 4000, MAX_COUNT + 1};
    return (int)draw(state, (uint64_t)below[draw(state, 5)]);
}

static inline void draw_plan(Plan *plan, uint64_t seed, uint64_t number, int size) {
    uint64_t state = mix(seed) ^ mix(number + 1);
    *plan = (Plan){.seed = seed, .number = number};
    plan->kind = (int)draw(&state, NUM_KINDS);
    plan->num_rounds = plan->kind == PERSISTENT || plan->kind == PARTITIONED ? 1 + (int)draw(&state, 3) : 1;
    plan->num_parts = plan->kind == PARTITIONED ? 1 + (int)draw(&state, 5) : 1;
    plan->num_letters = plan->kind == FACTS ? 0 : plan->kind == EXCHANGE ? size : 1 + (int)draw(&state,
                                                                                                (uint64_t)(4 * size));
    if (plan->num_letters > MAX_MESSAGES) plan->num_letters = MAX_MESSAGES;
    int shift = (int)draw(&state, (uint64_t)size);
    for (int i = 0; i < plan->num_letters; i++) {
        Letter *letter = &plan->letters[i];
        letter->source = (int)draw(&state, (uint64_t)size);
        letter->dest = (int)draw(&state, (uint64_t)size);
        letter->tag = i;
        letter->count = draw_count(&state) / plan->num_parts * plan->num_parts;
        /* One buffer serves for both ways, so all are as long as the first. */
        if (plan->kind == EXCHANGE) *letter = (Letter){i, (i + shift) % size, i,
        i ? plan->letters[0].count : letter->count};
    }
    plan->how = mix(state);
}

static inline int32_t value_of(const Plan *plan, int round, int letter, int k) {
    return (int32_t)mix(plan->seed ^ mix(plan->number << 32 | (uint64_t)round << 16 | (uint64_t)letter) ^ (uint64_t)k << 1);
}

/* What one message adds to its receiver's digest, in whatever order they come. */
static inline uint64_t digest_of(const int32_t *values, int stride, int source, int tag, int count) {
    uint64_t digest = mix((uint64_t)source << 40 ^ (uint64_t)tag << 20 ^ (uint64_t)count);
    for (int k = 0; k < count; k++) digest = mix(digest ^ (uint32_t)values[(size_t)k * (size_t)stride]);
    return digest;
}

static inline void complain(const char *text, const char *file, int line) {
    printf("wrong: %s (%s:%d)\n", text, file, line);
    fflush(stdout);
    MPI_Abort(MPI_COMM_WORLD, 3);
}
#define EXPECT(condition) ((condition) ? (void)0 : complain(#condition, __FILE__, __LINE__))

/* random_facts.c: what MPI promises whatever the seed: errors, cancelling, nobody, generalized requests. */
void check_facts(MPI_Comm errors_return, int rank, int size);
/* random_messages.c: a barrier of messages. */
void meet(void);

#endif
