// SPDX-License-Identifier: GPL-2.0
/*
 * Virtio ISM driver: DMBs of peers that lie in slabs.
 *
 * SMC does not say before the first move to a DMB that it will write it, and a move may not sleep.
 * So the first moves are the device's, while a work attaches the DMB. Stores begin when the device
 * has done all of them: they must not overtake.
 */
#include <linux/log2.h>
#include <linux/rculist.h>
#include <linux/slab.h>

#include "window.h"

#define VISM_MAX_PEER_DMBS	8192
/* How long a DMB that cannot be attached is remembered. */
#define VISM_REMEMBER		(60 * HZ)

/* What is known of a DMB of a peer. */
enum vism_peer_state {
	VISM_PEER_NEW,
	VISM_PEER_ATTACHING,
	VISM_PEER_MOVES,
	VISM_PEER_MAPPED,
};

/**
 * struct vism_peer_dmb - a DMB of a peer
 * @node: in &vism_window.peers
 * @rcu: for its end
 * @token: by which it is known
 * @state: &enum vism_peer_state
 * @attached: the device has attached it
 * @gone: it is not written any more
 * @settled: no move to it is under way
 * @since: when it was found that it cannot be attached
 * @owner: GID of its owner
 * @slab: in which it lies
 * @addr: its memory
 * @len: its length
 * @line: its signal line
 * @bit: its bit of the line
 */
struct vism_peer_dmb {
	struct hlist_node node;
	struct rcu_head rcu;
	u64 token;
	int state;
	bool attached;
	bool gone;
	bool settled;
	unsigned long since;
	uuid_t owner;
	struct vism_slab *slab;
	void *addr;
	u32 len;
	struct virtio_ism_line *line;
	u8 bit;
};

/* User: announces data. Returns whether the owner has to be kicked. */
static bool vism_line_raise(struct virtio_ism_line *line, u8 bit)
{
	u32 *armed = (u32 __force *)&line->armed;

	/* The data before the bit. */
	virt_wmb();
	vism_set_bit(bit, &line->pend);
	/* The bit before the look at the owner; the partner is in vism_line_arm(). */
	virt_mb();
	return READ_ONCE(*armed) && xchg(armed, 0);
}

static struct vism_peer_dmb *vism_find_peer(struct vism *ism, u64 token)
{
	struct vism_peer_dmb *peer;

	hash_for_each_possible_rcu(ism->window.peers, peer, node, token,
				   lockdep_is_held(&ism->dmb_lock))
		if (peer->token == token)
			return peer;
	return NULL;
}

/* Remembers a DMB, for the work to attach it. */
static void vism_add_peer(struct vism *ism, u64 token)
{
	struct vism_peer_dmb *peer;

	peer = kzalloc_obj(*peer, GFP_ATOMIC | __GFP_NOWARN);
	if (!peer)
		return;
	peer->token = token;
	scoped_guard(spinlock_irqsave, &ism->dmb_lock) {
		if (ism->window.npeers < VISM_MAX_PEER_DMBS &&
		    !vism_find_peer(ism, token)) {
			hash_add_rcu(ism->window.peers, &peer->node, token);
			ism->window.npeers++;
			peer = NULL;
			queue_work(system_dfl_wq, &ism->window.work);
		}
	}
	kfree(peer);
}

/* Stores as the device would: words that are read as a whole are stored as such, in order. */
static void vism_store(void *to, const void *from, u32 size)
{
	u64 word;

	if (size > 64 || !IS_ALIGNED((unsigned long)to | size, sizeof(word))) {
		memcpy(to, from, size);
		return;
	}
	for (u32 at = 0; at < size; at += sizeof(word)) {
		memcpy(&word, from + at, sizeof(word));
		/* A reader of the word sees what was stored before. */
		virt_store_release((u64 *)(to + at), word);
	}
}

/**
 * vism_window_move() - write into a DMB of a peer that is mapped
 * @ism: device
 * @token: of the DMB
 * @mask: what its owner is told by a kick
 * @signal: whether its owner is told
 * @offset: in the DMB
 * @data: what to write
 * @size: length of @data, may be 0
 *
 * Context: any; does not sleep.
 * Return: 0 if it is done, -EOPNOTSUPP if the device has to do it, or another error number.
 */
int vism_window_move(struct vism *ism, u64 token, u16 mask, bool signal,
		     u32 offset, const void *data, u32 size)
{
	struct vism_peer_dmb *peer;

	if (!ism->window.len || !vism_usable(ism))
		return -EOPNOTSUPP;
	guard(rcu)();
	peer = vism_find_peer(ism, token);
	if (!peer) {
		vism_add_peer(ism, token);
		return -EOPNOTSUPP;
	}
	if (READ_ONCE(peer->gone))
		return -EIO;
	/* Pairs with the release when it was attached. */
	if (smp_load_acquire(&peer->state) != VISM_PEER_MAPPED)
		return -EOPNOTSUPP;
	if (!READ_ONCE(peer->settled)) {
		if (!vism_move_settled(ism, token))
			return -EOPNOTSUPP;
		WRITE_ONCE(peer->settled, true);
	}
	if (offset > peer->len || size > peer->len - offset)
		return -EINVAL;
	vism_store(peer->addr + offset, data, size);
	atomic64_inc(&ism->window.stores);
	atomic64_add(size, &ism->window.bytes);
	if (signal && vism_line_raise(peer->line, peer->bit)) {
		atomic64_inc(&ism->window.kicks);
		/* One that finds no slot is no error: the owner looks within a second. */
		if (vism_move(ism, token, mask, true, 0, NULL, 0) == -EIO)
			return -EIO;
	}
	return 0;
}

static void vism_attach(struct vism *ism, struct vism_peer_dmb *peer)
{
	struct virtio_ism_token request = { .token = cpu_to_le64(peer->token) };
	int state = VISM_PEER_MOVES;
	struct virtio_ism_attach_reply reply;
	struct vism_slab *slab;
	struct vism_place place;

	guard(mutex)(&ism->window.mutex);
	peer->since = jiffies;
	if (vism_command(ism, VIRTIO_ISM_OP_ATTACH, &request, sizeof(request),
			 &reply, sizeof(reply)))
		goto done;
	scoped_guard(spinlock_irqsave, &ism->dmb_lock) {
		import_uuid(&peer->owner, reply.owner_gid);
		peer->attached = true;
		/* Its end may have been announced before this was known to be its DMB. */
		if (vism_has_left(ism, &peer->owner))
			WRITE_ONCE(peer->gone, true);
	}
	if (reply.flags & VIRTIO_ISM_ATTACH_MOVE_ONLY)
		goto done;
	place = (struct vism_place) {
		.dmb_off = le64_to_cpu(reply.dmb_off),
		.slab_off = le64_to_cpu(reply.slab_off),
		.slab_len = le32_to_cpu(reply.slab_len),
		.slab_id = le32_to_cpu(reply.slab_id),
		.dmb_len = le32_to_cpu(reply.dmb_len),
		.line = le16_to_cpu(reply.line),
		.bit = reply.bit,
		.nonce = reply.nonce,
	};
	slab = vism_get_slab(ism, &place, &peer->owner);
	if (IS_ERR(slab)) {
		if (PTR_ERR(slab) == -EPROTO)
			vism_fail(ism, "a peer's DMB in a place that cannot be");
		goto done;
	}
	peer->slab = slab;
	peer->addr = slab->addr + (place.dmb_off - place.slab_off);
	peer->len = place.dmb_len;
	peer->line = vism_line_at(slab, place.line);
	peer->bit = place.bit;
	state = VISM_PEER_MAPPED;
done:
	/* What was filled in comes before. */
	smp_store_release(&peer->state, state);
}

/* Ends the use of a DMB that is not in the table any more. */
static void vism_detach(struct vism *ism, struct vism_peer_dmb *peer)
{
	struct virtio_ism_token request = { .token = cpu_to_le64(peer->token) };

	/* Nobody stores into it from here on. */
	synchronize_rcu();
	if (peer->attached)
		vism_command(ism, VIRTIO_ISM_OP_DETACH, &request,
			     sizeof(request), NULL, 0);
	scoped_guard(mutex, &ism->window.mutex)
		if (peer->slab)
			vism_put_slab(ism, peer->slab);
	kfree(peer);
}

/* The next DMB of a peer to be attached, or to be detached and taken out of the table. */
static struct vism_peer_dmb *vism_next_peer(struct vism *ism, bool all)
{
	struct vism_peer_dmb *peer;
	int bucket;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	hash_for_each(ism->window.peers, bucket, peer, node) {
		if (all || peer->gone) {
			peer->gone = true;
			hash_del_rcu(&peer->node);
			ism->window.npeers--;
			return peer;
		}
		if (peer->state == VISM_PEER_NEW) {
			peer->state = VISM_PEER_ATTACHING;
			return peer;
		}
	}
	return NULL;
}

/**
 * vism_peer_work() - attach and detach DMBs of peers
 * @work: of a window
 */
void vism_peer_work(struct work_struct *work)
{
	struct vism *ism = container_of(work, struct vism, window.work);
	struct vism_peer_dmb *peer;

	while (vism_usable(ism)) {
		peer = vism_next_peer(ism, false);
		if (!peer)
			break;
		/* One that goes only now is still in the table, and comes again. */
		if (hash_hashed(&peer->node))
			vism_attach(ism, peer);
		else
			vism_detach(ism, peer);
	}
	vism_drop_orphans(ism);
}

/**
 * vism_detach_all() - forget all DMBs of peers
 * @ism: device, whose work does not run
 */
void vism_detach_all(struct vism *ism)
{
	struct vism_peer_dmb *peer;

	while ((peer = vism_next_peer(ism, true)))
		vism_detach(ism, peer);
}

/**
 * vism_forget_unattached() - forget DMBs that could not be attached a while ago
 * @ism: device
 */
void vism_forget_unattached(struct vism *ism)
{
	struct vism_peer_dmb *peer;
	struct hlist_node *next;
	int bucket;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	hash_for_each_safe(ism->window.peers, bucket, next, peer, node) {
		if (peer->state != VISM_PEER_MOVES || peer->attached ||
		    time_before(jiffies, peer->since + VISM_REMEMBER))
			continue;
		hash_del_rcu(&peer->node);
		ism->window.npeers--;
		kfree_rcu(peer, rcu);
	}
}

/**
 * vism_window_dmb_gone() - a DMB of a peer is gone
 * @ism: device
 * @token: of the DMB
 *
 * Context: any.
 */
void vism_window_dmb_gone(struct vism *ism, u64 token)
{
	struct vism_peer_dmb *peer;

	guard(spinlock_irqsave)(&ism->dmb_lock);
	peer = vism_find_peer(ism, token);
	if (!peer)
		return;
	WRITE_ONCE(peer->gone, true);
	queue_work(system_dfl_wq, &ism->window.work);
}

/**
 * vism_window_peer_down() - a peer has gone
 * @ism: device
 * @gid: of the peer
 *
 * Context: any.
 */
void vism_window_peer_down(struct vism *ism, const uuid_t *gid)
{
	struct vism_peer_dmb *peer;
	struct vism_slab *slab;
	int bucket;

	if (!ism->window.len)
		return;
	guard(spinlock_irqsave)(&ism->dmb_lock);
	list_for_each_entry(slab, &ism->window.slabs, list)
		if (uuid_equal(&slab->peer, gid))
			slab->orphan = true;
	hash_for_each(ism->window.peers, bucket, peer, node)
		if (peer->attached && uuid_equal(&peer->owner, gid))
			WRITE_ONCE(peer->gone, true);
	queue_work(system_dfl_wq, &ism->window.work);
}

