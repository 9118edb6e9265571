/* A single-producer single-consumer ring that spins: the yardstick of benchmarks/transport.py, not part of the library.
 * Each call moves num_slots slots of num_fields fields; a field's slots lie stride bytes apart. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

struct field {
    char *shared;
    char *private_copy;
    size_t bytes;
    size_t stride;
    size_t private_stride;
};

void spin_produce(_Atomic uint64_t *committed, _Atomic uint64_t *released, uint64_t num_slots, uint64_t capacity,
                  const struct field *fields, int num_fields) {
    uint64_t next = atomic_load_explicit(committed, memory_order_relaxed);
    uint64_t seen = atomic_load_explicit(released, memory_order_acquire);
    for (uint64_t end = next + num_slots; next < end; next++) {
        while (next - seen >= capacity) {
            PAUSE();
            seen = atomic_load_explicit(released, memory_order_acquire);
        }
        for (int index = 0; index < num_fields; index++)
            memcpy(fields[index].shared + (next % capacity) * fields[index].stride, fields[index].private_copy,
                   fields[index].bytes);
        atomic_store_explicit(committed, next + 1, memory_order_release);
    }
}

void spin_consume(_Atomic uint64_t *committed, _Atomic uint64_t *released, uint64_t num_slots, uint64_t capacity,
                  const struct field *fields, int num_fields) {
    uint64_t next = atomic_load_explicit(released, memory_order_relaxed);
    uint64_t seen = atomic_load_explicit(committed, memory_order_acquire);
    for (uint64_t end = next + num_slots; next < end; next++) {
        while (next == seen) {
            PAUSE();
            seen = atomic_load_explicit(committed, memory_order_acquire);
        }
        for (int index = 0; index < num_fields; index++)
            memcpy(fields[index].private_copy + (next % capacity) * fields[index].private_stride,
                   fields[index].shared + (next % capacity) * fields[index].stride, fields[index].bytes);
        atomic_store_explicit(released, next + 1, memory_order_release);
    }
}

/* Pass a line back and forth: the price of one hand-over of a cache line between the two cores. */
void ping_pong(_Atomic uint64_t *mine, _Atomic uint64_t *theirs, uint64_t num_rounds, int begins) {
    uint64_t base = atomic_load_explicit(mine, memory_order_relaxed);
    for (uint64_t turn = base + 1; turn <= base + num_rounds; turn++) {
        if (begins)
            atomic_store_explicit(mine, turn, memory_order_release);
        while (atomic_load_explicit(theirs, memory_order_acquire) < turn)
            PAUSE();
        if (!begins)
            atomic_store_explicit(mine, turn, memory_order_release);
    }
}
