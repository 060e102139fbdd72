/* The numbers of communicators: how do all members come to the same one, which nothing else has?
 *
 * Without a message: the number follows from the parent's and how many constructors have run on the parent, which is
 * the same on all members, or from the group where only its members make one.
 */
#include "comm.h"

/* Communicators that only some members of their parent make. */
struct MadeOfGroup {
    uint64_t key;
    int count;
    struct MadeOfGroup *next;
};

static uint64_t scramble(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t mix_numbers(uint64_t first, uint64_t second) {
    uint64_t mixed = scramble(scramble(first + 0x9e3779b97f4a7c15u) + second);
    /* Two bits are the library's: one for its own traffic, one for numbers that are no world's or self's. */
    return mixed >> 2 | (uint64_t)1 << 60;
}

uint64_t number_of_ranks(int count, const int *world_ranks) {
    uint64_t number = (uint64_t)count;
    for (int i = 0; i < count; i++) number = mix_numbers(number, (uint64_t)world_ranks[i]);
    return number;
}

uint64_t number_of_text(const char *text) {
    uint64_t number = 0;
    for (; *text; text++) number = mix_numbers(number, (unsigned char)*text);
    return number;
}

uint64_t next_number(Comm *parent, uint64_t more) {
    uint64_t made = 0;
    LOCKED made = (uint64_t)++parent->num_made;
    return mix_numbers(mix_numbers(parent->number, made), more);
}

int next_of_group(Comm *parent, uint64_t key) {
    int count = 0;
    LOCKED {
        struct MadeOfGroup *each = parent->made_of_group;
        while (each && each->key != key) each = each->next;
        if (!each) {
            each = NEW(struct MadeOfGroup);
            *each = (struct MadeOfGroup){key, 0, parent->made_of_group};
            parent->made_of_group = each;
        }
        count = ++each->count;
    }
    return count;
}

int next_tag(Comm *comm) {
    uint32_t begun = atomic_fetch_add(&comm->num_hidden, 1);
    return (int)(begun & 0x3fffffff) * 2;
}

void forget_made_of_group(Comm *comm) {
    while (comm->made_of_group) {
        struct MadeOfGroup *first = comm->made_of_group;
        comm->made_of_group = first->next;
        free(first);
    }
}
