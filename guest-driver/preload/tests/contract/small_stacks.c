// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Both ends of connections on threads with the smallest stack there is. `small_stacks MODE PORT`.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(is) \
    do { if (!(is)) { dprintf(2, "%s: line %d: %s, errno %d\n", name, __LINE__, #is, errno); _exit(3); } } while (0)
#define THREADS 4
#define TURNS 40
#define SIZE 4000

static const char *name;
static int port, listener = -1;
static __thread int round_of;

// Reads by another way each time, and waits for bytes by another way each time.
static void get(int fd, int set, char *room, int turn) {
    for (int got = 0; got < SIZE;) {
        struct pollfd one = { .fd = fd, .events = POLLIN };
        struct epoll_event event;
        int found = 1;
        do {
            if (turn % 3 == 0) found = poll(&one, 1, -1);
            if (turn % 3 == 1) found = epoll_wait(set, &event, 1, -1);
            // A relay that comes or goes may end a wait.
        } while (found < 0 && errno == EINTR);
        CHECK(found == 1);
        ssize_t n = turn % 2 ? read(fd, room + got, SIZE - got) : recv(fd, room + got, SIZE - got, 0);
        if (n <= 0) dprintf(2, "%s: round %d, turn %d: read %zd of %d at %d\n", name, round_of, turn, n, SIZE, got);
        CHECK(n > 0);
        got += n;
    }
}

static void put(int fd, const char *room, int turn) {
    ssize_t n = turn % 2 ? write(fd, room, SIZE) : send(fd, room, SIZE, 0);
    CHECK(n == SIZE);
}

static void go_to(int fd, struct sockaddr_in *to, int later) {
    int flags = fcntl(fd, F_GETFL), error = 0;
    socklen_t length = sizeof error;
    if (later) CHECK(fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0);
    int done = connect(fd, (void *)to, sizeof *to);
    CHECK(done == 0 || (later && errno == EINPROGRESS));
    struct pollfd one = { .fd = fd, .events = POLLOUT };
    CHECK(poll(&one, 1, -1) == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0);
    CHECK(error == 0 && fcntl(fd, F_SETFL, flags) == 0);
}

static void *work(void *unused) {
    (void)unused;
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    char *out = malloc(SIZE), *in = malloc(SIZE);
    for (int round = 0; round < 3; round++) {
        int fd;
        round_of = round;
        if (listener >= 0) {
            fd = accept(listener, NULL, NULL);
        } else {
            fd = socket(AF_INET, SOCK_STREAM, 0);
            go_to(fd, &to, round == 1);
        }
        CHECK(fd >= 0);
        int set = epoll_create1(0);
        struct epoll_event event = { .events = EPOLLIN };
        CHECK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
        for (int turn = 0; turn < TURNS; turn++) {
            if (round == 2 && turn == TURNS / 2) CHECK(system("true") == 0);
            if (listener >= 0) {
                get(fd, set, in, turn);
                put(fd, in, turn);
            } else {
                memset(out, turn + round, SIZE);
                put(fd, out, turn);
                get(fd, set, in, turn);
                CHECK(memcmp(in, out, SIZE) == 0);
            }
        }
        if (listener < 0) CHECK(shutdown(fd, SHUT_WR) == 0);
        CHECK(read(fd, in, SIZE) == 0);
        CHECK(close(fd) == 0 && close(set) == 0);
    }
    free(out);
    free(in);
    return NULL;
}

int main(int argc, char **argv) {
    name = argc > 1 ? argv[1] : "nobody";
    CHECK(argc == 4);
    port = atoi(argv[2]);
    if (strcmp(argv[1], "server") == 0) {
        struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        listener = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 16) == 0);
    }
    pthread_attr_t small;
    long size = atol(argv[3]);
    if (size == 0) size = sysconf(_SC_THREAD_STACK_MIN);
    CHECK(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, size) == 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], &small, work, NULL) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    puts("all bytes");
    return 0;
}
