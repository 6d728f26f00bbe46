// SPDX-License-Identifier: GPL-2.0
/*
 * Virtio ISM driver: moves.
 *
 * A client gives bytes that may lie on its stack, in a context that may not sleep. So they are
 * copied into a slot, and the move counts as done once the device has the slot. Moves to one DMB
 * use one queue, whose order the device keeps: data arrive before the control message behind them.
 *
 * The device's status comes later. A move that it has refused is told to the clients as an event of
 * that DMB, and the next move to it fails.
 */
#include <linux/hash.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "vism.h"

/* Of a slot: header, segment and payload. */
#define VISM_MESSAGE_LEN	SZ_16K
#define VISM_HEAD_LEN		(sizeof(struct virtio_ism_move) + \
				 sizeof(struct virtio_ism_segment))
/* A caller that finds no slot polls so long, since it may not sleep. */
#define VISM_FULL_MS		200
/* How long a late error may stay unseen. */
#define VISM_REAP_INTERVAL	(HZ / 20 + 1)

static void vism_remember_failed(struct vism *ism, u64 token)
{
	guard(spinlock_irqsave)(&ism->failed_lock);
	WRITE_ONCE(ism->failed_tokens[ism->next_failed], token);
	ism->next_failed = (ism->next_failed + 1) % VISM_FAILED_TOKENS;
}

static bool vism_has_failed(const struct vism *ism, u64 token)
{
	for (int i = 0; i < VISM_FAILED_TOKENS; i++)
		if (READ_ONCE(ism->failed_tokens[i]) == token)
			return true;
	return false;
}

/**
 * vism_reap() - take back slots whose moves are done
 * @queue: move queue, locked
 * @failed: tokens of moves that the device has refused
 * @room: how many fit there
 *
 * Return: number of entries in @failed. It stops when @failed is full.
 */
static unsigned int vism_reap(struct vism_move_queue *queue, u64 *failed,
			      unsigned int room)
{
	unsigned int nfailed = 0;
	struct vism_slot *slot;
	u32 len;

	while (nfailed < room) {
		slot = virtqueue_get_buf(queue->vq, &len);
		if (!slot)
			break;
		queue->outstanding--;
		queue->stuck = false;
		if (len < sizeof(slot->status) || READ_ONCE(slot->status)) {
			queue->errors++;
			failed[nfailed++] = slot->token;
		}
		slot->token = 0;
		slot->next = queue->free;
		queue->free = slot;
	}
	return nfailed;
}

static void vism_report_failed(struct vism *ism, const u64 *failed,
			       unsigned int nfailed)
{
	struct dibs_event event = {
		.type = DIBS_BUF_EVENT,
		.subtype = DIBS_BUF_UNREGISTERED,
	};

	for (unsigned int i = 0; i < nfailed; i++) {
		vism_remember_failed(ism, failed[i]);
		event.buffer_tok = failed[i];
		event.time = ktime_get_ns();
		vism_dibs_event(ism, &event);
	}
}

/**
 * vism_reaper() - look for late errors when nobody else does
 * @timer: of a move queue
 */
void vism_reaper(struct timer_list *timer)
{
	struct vism_move_queue *queue = timer_container_of(queue, timer, reaper);
	u64 failed[16];
	unsigned int nfailed = 0;
	unsigned long flags;
	bool broken;

	spin_lock_irqsave(&queue->lock, flags);
	if (queue->vq && vism_usable(queue->ism)) {
		nfailed = vism_reap(queue, failed, ARRAY_SIZE(failed));
		broken = virtqueue_is_broken(queue->vq);
		if (queue->outstanding)
			mod_timer(&queue->reaper, jiffies + VISM_REAP_INTERVAL);
	} else {
		broken = false;
	}
	spin_unlock_irqrestore(&queue->lock, flags);
	vism_report_failed(queue->ism, failed, nfailed);
	if (broken)
		vism_fail(queue->ism, "move queue broken");
}

/* Posts one move, whose payload fits into a slot. */
static int vism_post(struct vism_move_queue *queue, struct vism_slot *slot,
		     u64 token, u16 mask, bool signal, u32 offset,
		     const void *data, u32 size)
{
	struct scatterlist out, in, *sgs[2] = { &out, &in };
	struct virtio_ism_move *move = slot->message;
	struct virtio_ism_segment *segment = (void *)(move + 1);
	size_t len = sizeof(*move);

	*move = (struct virtio_ism_move) {
		.token = cpu_to_le64(token),
		.nseg = cpu_to_le16(size ? 1 : 0),
		.flags = cpu_to_le16(signal ? VIRTIO_ISM_MOVE_SIGNAL : 0),
		.mask = cpu_to_le16(mask),
		.total = cpu_to_le32(size),
	};
	if (size) {
		segment->offset = cpu_to_le32(offset);
		segment->len = cpu_to_le32(size);
		memcpy(segment + 1, data, size);
		len = VISM_HEAD_LEN + size;
	}
	slot->token = token;
	slot->status = cpu_to_le32(U32_MAX);
	sg_init_one(&out, move, len);
	sg_init_one(&in, &slot->status, sizeof(slot->status));
	return virtqueue_add_sgs(queue->vq, sgs, 1, 1, slot, GFP_ATOMIC);
}

static int vism_move_part(struct vism_move_queue *queue, u64 token, u16 mask,
			  bool signal, u32 offset, const void *data, u32 size)
{
	struct vism *ism = queue->ism;
	struct vism_slot *slot;
	unsigned int nfailed = 0;
	bool kick = false;
	unsigned long flags;
	u64 failed[4];
	u64 limit = 0;
	int rc;

	for (;;) {
		spin_lock_irqsave(&queue->lock, flags);
		if (!vism_usable(ism)) {
			rc = -EIO;
			break;
		}
		if (!queue->free)
			nfailed = vism_reap(queue, failed, ARRAY_SIZE(failed));
		slot = queue->free;
		if (slot) {
			queue->free = slot->next;
			rc = vism_post(queue, slot, token, mask, signal, offset,
				       data, size);
			if (rc) {
				slot->token = 0;
				slot->next = queue->free;
				queue->free = slot;
				break;
			}
			queue->outstanding++;
			queue->moves++;
			queue->bytes += size;
			kick = virtqueue_kick_prepare(queue->vq);
			if (!timer_pending(&queue->reaper))
				mod_timer(&queue->reaper,
					  jiffies + VISM_REAP_INTERVAL);
			break;
		}
		if (virtqueue_is_broken(queue->vq)) {
			rc = -EIO;
			break;
		}
		if (!limit && !queue->stuck) {
			queue->full++;
			limit = ktime_get_ns() + VISM_FULL_MS * NSEC_PER_MSEC;
		} else if (queue->stuck || ktime_get_ns() > limit) {
			/* Many connections would keep a processor for seconds. */
			queue->stuck = true;
			queue->dropped++;
			rc = -EBUSY;
			break;
		}
		spin_unlock_irqrestore(&queue->lock, flags);
		vism_report_failed(ism, failed, nfailed);
		nfailed = 0;
		cpu_relax();
	}
	if (kick && !virtqueue_notify(queue->vq))
		rc = -EIO;
	spin_unlock_irqrestore(&queue->lock, flags);
	vism_report_failed(ism, failed, nfailed);
	if (rc == -EIO)
		vism_fail(ism, "move queue broken");
	return rc;
}

static struct vism_move_queue *vism_move_queue_of(struct vism *ism, u64 token)
{
	return &ism->moves[hash_64(token, 16) % ism->limits.move_queues];
}

/**
 * vism_move_settled() - whether no move to a DMB is under way
 * @ism: device
 * @token: of the DMB
 *
 * Context: any; does not sleep.
 * Return: true if the device has done all moves to it.
 */
bool vism_move_settled(struct vism *ism, u64 token)
{
	struct vism_move_queue *queue = vism_move_queue_of(ism, token);
	unsigned int nfailed = 0;
	bool settled = false;
	unsigned long flags;
	u64 failed[4];

	spin_lock_irqsave(&queue->lock, flags);
	if (queue->vq && vism_usable(ism)) {
		nfailed = vism_reap(queue, failed, ARRAY_SIZE(failed));
		settled = true;
		for (unsigned int i = 0; i < queue->nslots; i++)
			if (queue->slots[i].token == token)
				settled = false;
	}
	spin_unlock_irqrestore(&queue->lock, flags);
	vism_report_failed(ism, failed, nfailed);
	return settled;
}

/**
 * vism_move() - write into a DMB of a peer
 * @ism: device
 * @token: of the DMB
 * @mask: what its owner is told
 * @signal: whether its owner is told
 * @offset: in the DMB
 * @data: what to write
 * @size: length of @data, may be 0
 *
 * Context: any; does not sleep.
 * Return: 0 if the device has the move. -EBUSY: it is too slow. -EIO: the device has failed, or a
 * move to this DMB has failed before.
 */
int vism_move(struct vism *ism, u64 token, u16 mask, bool signal, u32 offset,
	      const void *data, u32 size)
{
	u32 most = min_t(u32, VISM_MESSAGE_LEN - VISM_HEAD_LEN,
			 ism->limits.max_move);
	struct vism_move_queue *queue;
	u32 part;
	int rc;

	if (vism_has_failed(ism, token))
		return -EIO;
	queue = vism_move_queue_of(ism, token);
	do {
		part = min(size, most);
		rc = vism_move_part(queue, token, mask, signal && part == size,
				    offset, data, part);
		offset += part;
		data += part;
		size -= part;
	} while (!rc && size);
	return rc;
}

/**
 * vism_move_init() - allocate the slots of a move queue
 * @queue: its virtqueue exists
 *
 * Return: 0 or -ENOMEM.
 */
int vism_move_init(struct vism_move_queue *queue)
{
	unsigned int nslots;

	/* Two descriptors for each, and none left over if the queue is full. */
	nslots = min(VISM_MAX_SLOTS, virtqueue_get_vring_size(queue->vq) / 2);
	queue->slots = kcalloc(nslots, sizeof(*queue->slots), GFP_KERNEL);
	if (!queue->slots)
		return -ENOMEM;
	for (unsigned int i = 0; i < nslots; i++) {
		struct vism_slot *slot = &queue->slots[i];

		slot->message = (void *)__get_free_pages(GFP_KERNEL,
							 get_order(VISM_MESSAGE_LEN));
		if (!slot->message)
			return -ENOMEM;
		queue->nslots++;
		slot->next = queue->free;
		queue->free = slot;
	}
	/* Nobody waits for statuses: they are looked at when slots are short, and by the timer. */
	virtqueue_disable_cb(queue->vq);
	return 0;
}

/**
 * vism_move_exit() - free the slots of a move queue
 * @queue: its virtqueue has gone, and no move starts any more
 */
void vism_move_exit(struct vism_move_queue *queue)
{
	for (unsigned int i = 0; i < queue->nslots; i++)
		free_pages((unsigned long)queue->slots[i].message,
			   get_order(VISM_MESSAGE_LEN));
	kfree(queue->slots);
	queue->slots = NULL;
	queue->free = NULL;
	queue->nslots = 0;
	queue->outstanding = 0;
	queue->stuck = false;
}
