/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/* The echo server and client of checked.go, in C, with a thread for each connection. */
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LARGE = 100000 };

static struct sockaddr_in address;
static int share;

static void check(int so, const char *what)
{
    if (!so) {
        perror(what);
        exit(1);
    }
}

static int exactly(int fd, char *room, size_t size)
{
    return recv(fd, room, size, MSG_WAITALL) == (ssize_t)size;
}

static void send_all(int fd, const char *from, size_t size)
{
    while (size) {
        ssize_t n = send(fd, from, size, MSG_NOSIGNAL);
        check(n > 0, "send");
        from += n;
        size -= n;
    }
}

static void *echo(void *number)
{
    int fd = (long)number;
    char *body = malloc(LARGE);
    uint32_t size;
    while (exactly(fd, (char *)&size, 4)) {
        size = ntohl(size);
        check(size <= LARGE && exactly(fd, body, size), "receive");
        send_all(fd, body, size);
    }
    free(body);
    close(fd);
    return 0;
}

static void *ask(void *number)
{
    unsigned seed = (long)number;
    char *sent = malloc(4 + LARGE), *got = malloc(LARGE);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(!connect(fd, (void *)&address, sizeof address), "connect");
    for (int n = 0; n < share; n++) {
        uint32_t size = n % 100 ? 1 + n % 200 : LARGE, head = htonl(size);
        memcpy(sent, &head, 4);
        for (uint32_t at = 0; at < size; at++)
            sent[4 + at] = rand_r(&seed);
        send_all(fd, sent, 4 + size);
        check(exactly(fd, got, size) && !memcmp(sent + 4, got, size), "other bytes");
    }
    close(fd);
    free(sent);
    free(got);
    return 0;
}

int main(int count, char **words)
{
    pthread_t threads[100];
    struct timespec begun, ended;
    check(count > 2 && strchr(words[2], ':') != 0, "serve | ask ADDRESS:PORT");
    char *colon = strchr(words[2], ':');
    *colon = 0;
    address.sin_family = AF_INET;
    address.sin_port = htons(atoi(colon + 1));
    check(inet_pton(AF_INET, words[2], &address.sin_addr) == 1, "address");
    if (!strcmp(words[1], "serve")) {
        int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
        check(!setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one), "option");
        check(!bind(listener, (void *)&address, sizeof address), "bind");
        check(!listen(listener, 100), "listen");
        for (long fd; (fd = accept(listener, 0, 0)) >= 0; pthread_detach(threads[0]))
            check(!pthread_create(threads, 0, echo, (void *)fd), "thread");
        check(0, "accept");
    }
    check(count > 4, "connections and requests");
    int connections = atoi(words[3]);
    share = atoi(words[4]) / connections;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (long n = 0; n < connections; n++)
        check(!pthread_create(threads + n, 0, ask, (void *)(n + 1)), "thread");
    for (int n = 0; n < connections; n++)
        pthread_join(threads[n], 0);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double seconds = ended.tv_sec - begun.tv_sec + (ended.tv_nsec - begun.tv_nsec) / 1e9;
    printf("per second: %f\n", connections * share / seconds);
    return 0;
}
