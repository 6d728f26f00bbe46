// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A peer of AF_SMC that sends CLC messages of its own, on the same machine: TCP by hand over a TUN
 * device, because only there a program may write the SMC option (kind 254) into its SYN.
 *
 *   peer gid-byte N    proposes version 2 only, with N as the last byte of the ISM GID, which the
 *                      server should not look at: more than 8 ends the connection.
 *
 * It needs root, CONFIG_TUN, CONFIG_SMC, CONFIG_DIBS_LO.
 * Exit status: 0 the kernel does as it should, 1 it does not, 2 the program could not find out.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/genetlink.h>
#include <linux/if_tun.h>
#include <linux/netlink.h>
#include <linux/smc.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef AF_SMC
#define AF_SMC 43
#endif

/* Of this run only: those of the run before may be in use still. */
static int port, own_port;

/* Ends the program: it could not find out. */
static void fail(const char *what)
{
	perror(what);
	exit(2);
}

struct netlink_request {
	struct nlmsghdr head;
	struct genlmsghdr command;
	struct nlattr attribute;
	char value[64];
};

/* Sends one request and reads the first answer: its length, or -1 and errno. */
static ssize_t netlink_ask(int type, int command, int flags, int attribute, const void *value,
				  size_t len, char *answer, size_t room)
{
	struct netlink_request request = { 0 };
	struct nlmsghdr *head = (struct nlmsghdr *)answer;
	int socket_fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC);
	ssize_t got;

	request.head.nlmsg_type = type;
	request.head.nlmsg_flags = NLM_F_REQUEST | flags;
	request.head.nlmsg_len = NLMSG_LENGTH(GENL_HDRLEN);
	request.command.cmd = command;
	request.command.version = 1;
	if (value) {
		request.attribute.nla_type = attribute;
		request.attribute.nla_len = NLA_HDRLEN + len;
		memcpy(request.value, value, len);
		request.head.nlmsg_len += NLA_ALIGN(request.attribute.nla_len);
	}
	if (socket_fd < 0 || send(socket_fd, &request, request.head.nlmsg_len, 0) < 0)
		fail("netlink");
	got = recv(socket_fd, answer, room, 0);
	close(socket_fd);
	if (got >= (ssize_t)NLMSG_LENGTH(4) && head->nlmsg_type == NLMSG_ERROR) {
		errno = -*(int *)NLMSG_DATA(head);
		return errno ? -1 : got;
	}
	return got;
}

/* The attribute of a type among `len` bytes of attributes. */
static struct nlattr *netlink_find(void *attributes, int len, int type)
{
	struct nlattr *next = attributes;

	while (len >= NLA_HDRLEN && next->nla_len >= NLA_HDRLEN && next->nla_len <= len) {
		if ((next->nla_type & NLA_TYPE_MASK) == type)
			return next;
		len -= NLA_ALIGN(next->nla_len);
		next = (void *)((char *)next + NLA_ALIGN(next->nla_len));
	}
	return NULL;
}

/* The number of AF_SMC's family. */
static int smc_family(void)
{
	char answer[8192];
	ssize_t got = netlink_ask(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, 0, CTRL_ATTR_FAMILY_NAME,
				  SMC_GENL_FAMILY_NAME, sizeof(SMC_GENL_FAMILY_NAME), answer, sizeof(answer));
	struct nlattr *id = NULL;

	if (got > 0)
		id = netlink_find(answer + NLMSG_LENGTH(GENL_HDRLEN), got - NLMSG_LENGTH(GENL_HDRLEN),
				  CTRL_ATTR_FAMILY_ID);
	if (!id)
		fail("SMC_GEN_NETLINK");
	return *(uint16_t *)(id + 1);
}

/* Without an enterprise id AF_SMC is only TCP. */
static void add_ueid(const char *name)
{
	char text[33], answer[8192];

	snprintf(text, sizeof(text), "%-32s", name);
	if (netlink_ask(smc_family(), SMC_NETLINK_ADD_UEID, NLM_F_ACK, SMC_NLA_EID_TABLE_ENTRY, text, sizeof(text), answer,
			sizeof(answer)) < 0 &&
	    errno != EEXIST)
		fail("enterprise id");
}

/* A listener of AF_SMC on all addresses. */
static int smc_listener(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int on = 1, listener = socket(AF_SMC, SOCK_STREAM, 0);

	if (listener < 0)
		fail("socket(AF_SMC)");
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(listener, 8) < 0)
		fail("listen");
	return listener;
}

#define KERNEL_ADDRESS 0x0a090101u /* 10.9.1.1, of the TUN device */
#define OWN_ADDRESS 0x0a090102u	   /* 10.9.1.2 */
#define FIN 1
#define SYN 2
#define RST 4
#define ACK 16

static int tun;
static uint32_t next_seq = 1000, next_ack;

static uint32_t sum(const uint8_t *bytes, size_t len, uint32_t start)
{
	for (size_t i = 0; i < len; i++)
		start += i % 2 ? bytes[i] : bytes[i] << 8;
	return start;
}

static uint16_t folded(uint32_t total)
{
	while (total >> 16)
		total = (total & 0xffff) + (total >> 16);
	return (uint16_t)~total;
}

static void put16(uint8_t *at, uint32_t value)
{
	at[0] = value >> 8;
	at[1] = value;
}

static void put32(uint8_t *at, uint32_t value)
{
	put16(at, value >> 16);
	put16(at + 2, value);
}

static uint32_t get32(const uint8_t *at)
{
	return (uint32_t)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3];
}

/* One segment. A SYN has the option. */
static void send_segment(int flags, const void *data, size_t len)
{
	static const uint8_t option[8] = { 1, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9 };
	size_t options = flags & SYN ? sizeof(option) : 0, tcp_len = 20 + options + len;
	uint8_t packet[1500] = { 0x45 }, *tcp = packet + 20;
	uint32_t total;

	put16(packet + 2, 20 + tcp_len);
	packet[8] = 64;
	packet[9] = IPPROTO_TCP;
	put32(packet + 12, OWN_ADDRESS);
	put32(packet + 16, KERNEL_ADDRESS);
	put16(packet + 10, folded(sum(packet, 20, 0)));
	put16(tcp, own_port);
	put16(tcp + 2, port);
	put32(tcp + 4, next_seq);
	put32(tcp + 8, next_ack);
	tcp[12] = (20 + options) / 4 << 4;
	tcp[13] = flags;
	put16(tcp + 14, 60000);
	memcpy(tcp + 20, option, options);
	if (len)
		memcpy(tcp + 20 + options, data, len);
	total = sum(packet + 12, 8, IPPROTO_TCP + tcp_len);
	put16(tcp + 16, folded(sum(tcp, tcp_len, total)));
	if (write(tun, packet, 20 + tcp_len) < 0)
		fail("write to the TUN device");
	next_seq += len + (flags & (SYN | FIN) ? 1 : 0);
}

/* The next segment of the connection with data or an end: its length, -1 FIN, -2 RST, -3 nothing. */
static int receive(uint8_t *data, int limit_ms)
{
	for (;;) {
		struct pollfd look = { .fd = tun, .events = POLLIN };
		uint8_t packet[2048], *tcp = packet + 20;
		ssize_t len;
		int head, flags;

		if (poll(&look, 1, limit_ms) <= 0)
			return -3;
		len = read(tun, packet, sizeof(packet));
		if (len < 40 || packet[0] != 0x45 || packet[9] != IPPROTO_TCP)
			continue;
		head = tcp[12] >> 4 << 2;
		flags = tcp[13];
		if (flags & RST)
			return -2;
		if (flags & SYN) {
			if (!(flags & ACK))
				port = tcp[0] << 8 | tcp[1];
			next_ack = get32(tcp + 4) + 1;
			/* Without the option of both ends AF_SMC is TCP. */
			for (uint8_t *at = tcp + 20; at < tcp + head && *at; at += *at == 1 ? 1 : at[1])
				if (*at == 254)
					return 0;
			fprintf(stderr, "the kernel has not answered the option\n");
			exit(2);
		}
		if (get32(tcp + 4) != next_ack)
			continue;
		len -= 20 + head;
		next_ack += len + (flags & FIN ? 1 : 0);
		if (len > 0) {
			memcpy(data, tcp + head, len);
			send_segment(ACK, NULL, 0);
			return len;
		}
		if (flags & FIN)
			return -1;
	}
}

static void open_tun(void)
{
	struct ifreq request = { .ifr_flags = IFF_TUN | IFF_NO_PI };
	struct sockaddr_in *address = (struct sockaddr_in *)&request.ifr_addr;
	int control = socket(AF_INET, SOCK_DGRAM, 0);

	tun = open("/dev/net/tun", O_RDWR);
	if (tun < 0)
		tun = open("/dev/tun", O_RDWR);
	if (tun < 0 || ioctl(tun, TUNSETIFF, &request) < 0)
		fail("TUN");
	*address = (struct sockaddr_in){ .sin_family = AF_INET,
					 .sin_addr.s_addr = htonl(KERNEL_ADDRESS) };
	if (ioctl(control, SIOCSIFADDR, &request) < 0)
		fail("address");
	address->sin_addr.s_addr = htonl(0xffffff00);
	if (ioctl(control, SIOCSIFNETMASK, &request) < 0)
		fail("mask");
	request.ifr_flags = IFF_UP | IFF_RUNNING;
	if (ioctl(control, SIOCSIFFLAGS, &request) < 0)
		fail("up");
	close(control);
}

/* A server on AF_SMC that sends back what it gets. */
static void serve(void)
{
	int listener = smc_listener();

	if (fork())
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		char buffer[4096];
		ssize_t n;
		int stream = accept(listener, NULL, NULL);

		while (stream >= 0 && (n = read(stream, buffer, sizeof(buffer))) > 0)
			if (write(stream, buffer, n) < 0)
				break;
		close(stream);
	}
}

/* The GID of the loopback device. */
static void loopback_gid(uint8_t *gid)
{
	FILE *file = fopen("/sys/class/dibs/lo/gid", "r");
	unsigned int byte;

	if (!file)
		fail("no loopback device (CONFIG_DIBS_LO)");
	for (int at = 0; at < 16; at++) {
		if (at == 4 || at == 6 || at == 8 || at == 10)
			fgetc(file);
		if (fscanf(file, "%2x", &byte) != 1)
			fail("GID of the loopback device");
		gid[at] = byte;
	}
	fclose(file);
}

/* A Proposal of version 2 of SMC-D for the loopback device. */
static void propose(uint8_t last_byte_of_gid)
{
	uint8_t message[224] = { 0xe2, 0xd4, 0xc3, 0xd9, 1 }, gid[16];

	loopback_gid(gid);
	put16(message + 5, sizeof(message));
	message[7] = 0x26; /* version 2; SMC-D of version 2; nothing of version 1 */
	message[47] = last_byte_of_gid;
	put16(message + 50, 28); /* from here to the extension at 80 */
	message[80] = 1;	 /* EIDs */
	message[81] = 2;	 /* entries: an emulated device has two */
	message[83] = 0x10;	 /* release 2.1 */
	put16(message + 86, 64); /* from here to the extension of SMC-D at 152 */
	put16(message + 106, 1); /* feature: emulated devices */
	memset(message + 120, ' ', 32);
	memcpy(message + 120, "REPRO", 5);
	for (int half = 0; half < 2; half++) {
		memcpy(message + 200 + half * 10, gid + half * 8, 8);
		put16(message + 208 + half * 10, 0xffff);
	}
	memcpy(message + 220, message, 4);
	send_segment(ACK, message, sizeof(message));
}

int main(int count, char **words)
{
	uint8_t data[2048];
	int len;

	if (count != 3 || strcmp(words[1], "gid-byte")) {
		fprintf(stderr, "usage: peer gid-byte N\n");
		return 2;
	}
	setbuf(stdout, NULL);
	port = 5000 + getpid() % 10000;
	own_port = port + 20000;
	add_ueid("REPRO");
	open_tun();
	serve();
	send_segment(SYN, NULL, 0);
	if (receive(data, 3000) != 0) {
		fprintf(stderr, "no answer to the SYN\n");
		return 2;
	}
	send_segment(ACK, NULL, 0);
	propose(atoi(words[2]));
	len = receive(data, 8000);
	if (len < 8 || data[4] != 2) {
		printf("no Accept: %s\n", len == -1 ? "FIN" : len == -2 ? "RST" : "another answer");
		if (len >= 20)
			printf("type %d, code %08x\n", data[4], get32(data + 16));
		return len < 0 ? 1 : 2;
	}
	printf("an Accept of %d bytes\n", len);
	return 0;
}
